"""What runs in the tracing child alone: it may import torch, and the parent never imports it."""
