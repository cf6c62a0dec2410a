"""What a Python model imports as ``pb_utils``."""
