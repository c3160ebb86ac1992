"""From logits to token ids: penalties, masks, the largest, and random choice."""
