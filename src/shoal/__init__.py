"""Shoal trains language models and speech-language models on any mesh of devices."""
