"""The ladder experiment: what does each change buy? With an error bar."""
