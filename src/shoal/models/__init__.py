"""From a Hugging Face folder to a sharded, loaded, trainable module."""
