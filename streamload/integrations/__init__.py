"""streamload under trainings that others wrote."""
