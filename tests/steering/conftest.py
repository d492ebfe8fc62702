"""Puts this folder's helpers on the import path, which pytest does where a conftest is."""
