"""What runs in the tracing child alone: everything here may import torch, nothing here is imported
by the parent.
"""
