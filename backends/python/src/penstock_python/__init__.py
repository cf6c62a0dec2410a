"""The backend ``python`` of Penstock: Triton's Python models, unchanged."""
