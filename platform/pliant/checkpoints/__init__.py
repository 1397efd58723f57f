"""Training state on disk: fragments of tensors in safetensors files, and a manifest written last.

A checkpoint holds tensors and JSON only: nothing is ever unpickled from one.
"""
