"""GGUF model files: ``file.open_gguf`` maps and checks a file, ``writer.write_gguf`` writes one."""
