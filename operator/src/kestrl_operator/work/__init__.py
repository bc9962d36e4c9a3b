"""Work of the operator: the queue, the record of the object in hand, and quarantine."""
