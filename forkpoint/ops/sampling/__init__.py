"""Logits to token ids: penalties, masks, greedy choice and random sampling."""
