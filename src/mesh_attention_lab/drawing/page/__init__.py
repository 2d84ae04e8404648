"""The explorer: one HTML file, with no network, in which a person sees what plans do and when.

Plans and timelines come in, a page goes out; nothing is planned, simulated or measured here. `document` makes the text
of template.html, page.css and the scripts.
"""

from mesh_attention_lab.drawing.page.document import Scene, page, write_page

__all__ = ["Scene", "page", "write_page"]
