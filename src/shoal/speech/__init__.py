"""Speech language models: log-mel front ends, encoders, perception, prompts, SALM."""
