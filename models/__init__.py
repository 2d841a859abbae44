"""Reference PyTorch modules and tiny seeded models; ships as `rmsnorm_onnx.models`."""
