"""The only room that imports vllm: one file per seam."""
