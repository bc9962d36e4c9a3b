"""The operator: an AgentRLJob becomes Kubernetes objects, and what is observed of them its status."""
