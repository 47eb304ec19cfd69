"""What the processes of one machine have from its operating system: channels, memory, open files, each other's ends."""
