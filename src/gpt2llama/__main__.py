"""`python -m gpt2llama` is `gpt2llama`."""

from .cli.main import main

if __name__ == "__main__":
    main()
