"""From a text continuer to an assistant, on the one trainer."""
