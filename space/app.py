"""The page of `mmfast demo` as a Hugging Face Space."""

from mmfast.cli import main

if __name__ == "__main__":
    main(["demo", "--host", "0.0.0.0", "--port", "7860", "--no-open"])
