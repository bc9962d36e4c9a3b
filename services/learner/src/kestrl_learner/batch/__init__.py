"""Scored groups as rows of tokens, advantages and masks."""
