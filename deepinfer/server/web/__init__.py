"""The web page: a chat at `/` and live graphs at `/status`, in plain HTML, CSS and JavaScript."""
