"""Starters of jobs: folders that `kestrl new` copies, and what copies them."""
