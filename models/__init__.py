"""Tiny seeded PyTorch models, the norms they hold, and a demonstration on them; ships as `rmsnorm_onnx.models`."""
