"""The explorer: one HTML file, with no network, in which a person sees what plans do and when.

Plans and timelines come in, a page goes out; nothing is planned, simulated or measured here. Reading order: scene,
relative, passes, document; then template.html, page.css and the scripts.
"""

from mesh_attention_lab.drawing.page.document import page, write_page
from mesh_attention_lab.drawing.page.scene import Scene

__all__ = ["Scene", "page", "write_page"]
