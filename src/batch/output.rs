//! Where answers go. A file gets its name only when it is whole: until then it is `OUT.partial`,
//! one whole line after the other, from which a later run can go on.

use std::collections::HashMap;
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufRead, Seek};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde_json::Value;
use tokio::io::{AsyncWrite, AsyncWriteExt};

use super::input::Line;

/// What to do with what is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// Refuse to start.
    Keep,
    /// Start over; what is there goes once the new file is whole.
    Overwrite,
    /// Go on with `OUT.partial`.
    Resume,
}

/// An open output.
pub struct Output {
    writer: Box<dyn AsyncWrite + Unpin + Send>,
    /// Where it is written, and what it is called at the end; `None` for a pipe or a device.
    names: Option<(PathBuf, PathBuf)>,
    replace: bool,
    done: Done,
    /// Whether the file holds an answer.
    holds_answers: bool,
}

/// Lines that an earlier run answered: number to the hash of their `custom_id`. As large as the
/// file that is gone on with has lines.
#[derive(Debug, Default)]
pub struct Done(HashMap<u64, u64>);

impl Done {
    /// Whether `line` was answered before.
    ///
    /// # Errors
    /// When a line of that number was, but another one.
    pub fn has(&self, line: &Line) -> anyhow::Result<bool> {
        match self.0.get(&line.number) {
            None => Ok(false),
            Some(&name) if name == name_hash(line.custom_id.as_deref()) => Ok(true),
            Some(_) => bail!(
                "line {} is not the one that was answered before: --resume needs the same input",
                line.number
            ),
        }
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

fn name_hash(name: Option<&str>) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

/// The field `id` of the answer to a line.
pub fn answer_id(line: u64) -> String {
    format!("{ID_PREFIX}{line}")
}

const ID_PREFIX: &str = "batch_req_";

impl Output {
    /// Opens `path`; `-` is standard output.
    ///
    /// # Errors
    /// When there is something that is to be kept, or it cannot be written.
    pub fn open(path: &Path, existing: Existing) -> anyhow::Result<Self> {
        let direct = |writer| Self {
            writer,
            names: None,
            replace: false,
            done: Done::default(),
            holds_answers: false,
        };
        if path.as_os_str() == "-" {
            return Ok(direct(Box::new(tokio::io::stdout())));
        }
        let shown = path.display();
        match std::fs::metadata(path) {
            Ok(found) if found.is_dir() => bail!("{shown} is a folder; name a file"),
            Ok(found) if !found.is_file() => {
                let file = std::fs::File::options().write(true).open(path);
                let file = file.with_context(|| format!("while opening {shown}"))?;
                return Ok(direct(Box::new(tokio::fs::File::from_std(file))));
            }
            Ok(_) if existing != Existing::Overwrite => {
                bail!("{shown} exists; name another file, or say --overwrite")
            }
            _ => {}
        }
        let partial = partial_name(path);
        let partial_shown = partial.display().to_string();
        let opening = || format!("while opening {partial_shown}");
        let (file, done) = match existing {
            Existing::Resume if partial.exists() => resume(&partial).with_context(opening)?,
            Existing::Overwrite => {
                (std::fs::File::create(&partial).with_context(opening)?, Done::default())
            }
            Existing::Keep | Existing::Resume => match std::fs::File::create_new(&partial) {
                Ok(file) => (file, Done::default()),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => bail!(
                    "{partial_shown} is left from a run that did not end; go on with --resume, or \
                     start over with --overwrite"
                ),
                Err(error) => return Err(error).with_context(opening),
            },
        };
        Ok(Self {
            writer: Box::new(tokio::fs::File::from_std(file)),
            names: Some((partial, path.to_owned())),
            replace: existing == Existing::Overwrite,
            holds_answers: done.len() > 0,
            done,
        })
    }

    /// What needs no answer any more.
    pub fn take_done(&mut self) -> Done {
        std::mem::take(&mut self.done)
    }

    /// Adds one answer.
    ///
    /// # Errors
    /// When it cannot be written.
    pub async fn write(&mut self, answer: &str) -> anyhow::Result<()> {
        let line = format!("{answer}\n");
        self.holds_answers = true;
        let written = async {
            self.writer.write_all(line.as_bytes()).await?;
            self.writer.flush().await
        };
        // As text: to main a broken pipe of some other output is no failure to tell of.
        written.await.map_err(|error| anyhow::anyhow!("while writing answers: {error}"))
    }

    /// Every line is answered: the file gets its name.
    ///
    /// # Errors
    /// When that cannot be done; the answers then stay where they are.
    pub fn finish(&mut self) -> anyhow::Result<()> {
        let Some((partial, path)) = self.names.take() else { return Ok(()) };
        if path.exists() && !self.replace {
            let (partial, path) = (partial.display(), path.display());
            bail!("{path} has come into being meanwhile; the answers are in {partial}");
        }
        let rename = || {
            std::fs::File::open(&partial)?.sync_all()?;
            std::fs::rename(&partial, &path)
        };
        rename().with_context(|| format!("while naming the answers {}", path.display()))
    }

    /// Where the answers so far are, if that is a file with any.
    pub fn partial(&self) -> Option<&Path> {
        self.names.as_ref().filter(|_| self.holds_answers).map(|(partial, _)| partial.as_path())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        // A run that failed before its first answer leaves nothing that the next would stumble on.
        if let Some((partial, _)) = &self.names
            && !self.holds_answers
        {
            let _ = std::fs::remove_file(partial);
        }
    }
}

fn partial_name(path: &Path) -> PathBuf {
    let mut name: OsString = path.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

/// Opens what an earlier run left, without a last line that was cut off, ready to be added to.
fn resume(partial: &Path) -> anyhow::Result<(std::fs::File, Done)> {
    let mut file = std::fs::File::options().read(true).write(true).open(partial)?;
    let mut done = HashMap::new();
    let mut reader = std::io::BufReader::new(&file);
    let (mut line, mut whole) = (String::new(), 0);
    loop {
        line.clear();
        let bytes = reader.read_line(&mut line)?;
        if bytes == 0 || !line.ends_with('\n') {
            break;
        }
        let answer: Value = serde_json::from_str(&line).unwrap_or_default();
        let id = answer["id"].as_str().and_then(|id| id.strip_prefix(ID_PREFIX)?.parse().ok());
        let number: u64 = id.context("holds lines that are no answers of ours")?;
        done.insert(number, name_hash(answer["custom_id"].as_str()));
        whole += bytes as u64;
    }
    file.set_len(whole)?;
    file.seek(std::io::SeekFrom::End(0))?;
    Ok((file, Done(done)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Opens `out.jsonl` beside `files`, adds a line, ends; then what is there.
    fn check(files: &[(&str, &str)], existing: Existing) -> String {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let path = folder.path().join("out.jsonl");
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let outcome = runtime.block_on(async {
            let mut output = Output::open(&path, existing)?;
            let done = output.take_done().len();
            output.write("new").await?;
            output.finish()?;
            anyhow::Ok(done)
        });
        let mut shown = match outcome {
            Ok(done) => format!("fine, {done} done before\n"),
            Err(error) => format!("{error:#}\n"),
        };
        let mut names: Vec<_> =
            std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path()).collect();
        names.sort();
        for name in names {
            let text = std::fs::read_to_string(&name).unwrap();
            shown += &format!("{}: {text:?}\n", name.file_name().unwrap().display());
        }
        shown.replace(&*folder.path().to_string_lossy(), "FOLDER")
    }

    const ANSWERED: &str = "{\"id\":\"batch_req_3\",\"custom_id\":\"a\"}\n";

    #[test]
    fn nothing_is_lost_that_was_not_given_up() {
        let out = ("out.jsonl", "old");
        let partial = ("out.jsonl.partial", ANSWERED);
        insta::assert_snapshot!(check(&[], Existing::Keep), @r#"
        fine, 0 done before
        out.jsonl: "new\n"
        "#);
        insta::assert_snapshot!(check(&[out], Existing::Keep), @r#"
        FOLDER/out.jsonl exists; name another file, or say --overwrite
        out.jsonl: "old"
        "#);
        insta::assert_snapshot!(check(&[out, partial], Existing::Resume), @r#"
        FOLDER/out.jsonl exists; name another file, or say --overwrite
        out.jsonl: "old"
        out.jsonl.partial: "{\"id\":\"batch_req_3\",\"custom_id\":\"a\"}\n"
        "#);
        insta::assert_snapshot!(check(&[partial], Existing::Keep), @r#"
        FOLDER/out.jsonl.partial is left from a run that did not end; go on with --resume, or start over with --overwrite
        out.jsonl.partial: "{\"id\":\"batch_req_3\",\"custom_id\":\"a\"}\n"
        "#);
        insta::assert_snapshot!(check(&[out, partial], Existing::Overwrite), @r#"
        fine, 0 done before
        out.jsonl: "new\n"
        "#);
    }

    #[test]
    fn a_run_without_answers_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        drop(Output::open(&folder.path().join("out.jsonl"), Existing::Keep).unwrap());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_run_goes_on_after_the_last_whole_line() {
        let cut = format!("{ANSWERED}{{\"id\":\"batch_re");
        insta::assert_snapshot!(check(&[("out.jsonl.partial", &cut)], Existing::Resume), @r#"
        fine, 1 done before
        out.jsonl: "{\"id\":\"batch_req_3\",\"custom_id\":\"a\"}\nnew\n"
        "#);
        let foreign = ("out.jsonl.partial", "somebody's diary\n");
        insta::assert_snapshot!(check(&[foreign], Existing::Resume), @r#"
        while opening FOLDER/out.jsonl.partial: holds lines that are no answers of ours
        out.jsonl.partial: "somebody's diary\n"
        "#);
    }
}
