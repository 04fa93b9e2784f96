"""Other people's trainers over the same two parts, PackedCache and kl_loss: one module for each trainer."""
