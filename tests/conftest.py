"""Puts this folder on the import path, so that rooms can share `tiny_tokenizers`."""
