"""Text in and out: tokenizers, streaming, chat templates, stop strings. Knows no models."""
