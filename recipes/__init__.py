"""The recipe files that ship with the package, in MindFormers YAML."""
