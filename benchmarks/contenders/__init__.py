"""One loader a file. Each reads a job (JSON, its first argument) and prints what it measured (JSON)."""
