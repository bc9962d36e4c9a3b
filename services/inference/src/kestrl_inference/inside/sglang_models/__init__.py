"""Models that SGLang imports first (`SGLANG_EXTERNAL_MODEL_PACKAGE`), instead of all that it knows; it imports the
others when a model is none of these.
"""
