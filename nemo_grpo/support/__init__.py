"""Errors, files, processes and folders: shared by all packages, importing none of them."""
