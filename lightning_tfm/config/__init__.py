"""Configuration: YAML files, experiments and their claims, trusted classes, and messages for parsing errors."""
