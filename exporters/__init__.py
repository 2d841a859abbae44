"""From a framework to ONNX; ships as `rmsnorm_onnx.exporters`."""
