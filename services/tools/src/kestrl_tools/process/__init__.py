"""Python tools in processes of their own: `provider` runs in the tool service, `host` imports the tool once and forks
a process for every episode, `session` is what such a process does, `frames` is the form of their messages.
"""
