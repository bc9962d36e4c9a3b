"""Supervised fine-tuning: conversations as training rows, and the loop over them."""
