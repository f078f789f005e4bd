"""What the user wrote: YAML files, experiments and their claims, trusted classes, messages for mistakes."""
