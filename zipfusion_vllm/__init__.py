"""ZipFusion for vLLM: a lossless, compressed KV cache that attention reads as it is stored."""

__version__ = "0.1.0"
