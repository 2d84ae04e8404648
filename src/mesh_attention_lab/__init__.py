"""What people look with: the command line, charts, the explorer page, replay on one device, measured timelines.

`mesh_attention` never imports this package.
"""
