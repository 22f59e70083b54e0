"""Code that travels with an exported folder, for what no class of Hugging Face's computes. See interop/export_code.py."""
