"""The operators that timm names on import."""
