"""Parts of `how_fast_on_nccl`: other libraries and this one behind one call, checked and timed by the same processes.

Nothing of the other libraries is here. They are imported from a folder that the user names.
"""
