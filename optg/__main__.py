from optg.trust import leave_working_directory


def main() -> None:
    """Start the command line. Before anything else is imported, take the working directory off sys.path."""
    leave_working_directory()
    from optg import cli

    cli.main()


if __name__ == "__main__":
    main()
