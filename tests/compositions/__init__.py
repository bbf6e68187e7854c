"""Random compositions of features, each trained and compared with one process: `make fuzz`, docs/compositions.md."""
