"""From a plan to Kubernetes objects. Pure: the same job gives the same objects."""

from kestrl_operator.render.job import Given, render

__all__ = ["Given", "render"]
