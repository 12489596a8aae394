"""Published evaluation sets, from the files that their authors distribute to evaluation folders: a module for each."""
