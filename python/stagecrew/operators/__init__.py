"""Ready-made operators: coordinators with their task sides."""
