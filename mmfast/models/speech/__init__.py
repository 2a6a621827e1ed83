"""Speech models: the embedded one, Moshi, CSM and Qwen2.5-Omni."""
