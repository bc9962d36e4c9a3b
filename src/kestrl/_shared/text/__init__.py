"""Conversations as token ids and back: chat template, tokenizer and tool-call format."""
