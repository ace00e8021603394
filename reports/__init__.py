"""What people read: tables, figures and the page. Reads storage alone and never imports the engine."""
