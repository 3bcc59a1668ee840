"""The documented settings: plain data, grouped by concern, checked on construction. Does not import torch."""
