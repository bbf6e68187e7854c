"""What all else uses: errors, checks of settings, devices, files, text, and differences between versions of torch."""
